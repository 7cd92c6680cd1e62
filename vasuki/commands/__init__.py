"""What people type, with one composition root for each command.

cli            the command line
run            `vasuki run`; watch: the same for each file that arrives; stream: for each row
run_options    what its command line says beside the job
fleet/         the same on several devices
forecast       `vasuki plan` and `simulate`, without a model
check          `vasuki check`
starter        `vasuki init`
workload       what has to run: lengths of a job's requests, the shape of its model
manifests      every manifest, built once
step_tracer    steps into the trace of a run; progress: its bar
signals        what ends a process well
"""
