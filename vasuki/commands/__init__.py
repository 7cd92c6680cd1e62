"""What people type.

cli          the command line; options: what several commands take
check        `vasuki check`
starter      `vasuki init`
job_schema   what editors know of job.yaml
"""
