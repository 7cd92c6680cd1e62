"""What people type.

cli          the command line
check        `vasuki check`
starter      `vasuki init`
job_schema   what editors know of job.yaml
"""
