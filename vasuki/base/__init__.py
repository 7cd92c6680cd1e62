"""What every room stands on.

config    what a job says, section by section; config_values: what a value may look like
job_file  job.yaml -> JobConfig; yaml_text: YAML, read with care; schema: what is wrong with a file, in words
logs      what goes to stderr
errors    exceptions with their exit codes
units     figures as people read them
commits   when finished rows become durable
conversations  where the model goes on behind a conversation
constraint  what answers have to look like
arrays    names for numpy arrays
urls      addresses of object stores, without the keys that open them
files     reads small files whole; refuses pipes and devices
streams   stdin, stdout and stderr, made so that no run ends by them
home      a home folder for users who have none
version   which vasuki this is
"""
