"""What people type, with one composition root for each command.

cli            the command line
run            `vasuki run`; watch: the same for each file that arrives
forecast       `vasuki plan`, `simulate` and `check`, without a model
starter        `vasuki init`
workload       what has to run: lengths of a job's requests, the shape of its model
step_tracer    steps into the trace of a run; progress: its bar
signals        what ends a process well
"""
