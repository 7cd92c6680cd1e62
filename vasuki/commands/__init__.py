"""What people type, with one composition root for each command.

cli            the command line
run            `vasuki run`; watch: the same for each file that arrives; stream: for each row
run_options    what its command line says beside the job
fleet/         the same on several devices; cluster/: on those of a Ray cluster
forecast       `vasuki plan` and `simulate`, without a model; planned_fleets: which cards to rent
check          `vasuki check`
starter        `vasuki init`
workload       what has to run: lengths of a job's requests, the shape of its model
this_machine   the machine that a job is planned and run on; foresight: where its rates come from
hindsight      what knowing all lengths would have saved
manifests      every manifest, built once
step_tracer    steps into the trace of a run; progress: its bar
metrics        figures of a run while it lasts; watchdog: steps that hang; deadline: an end that comes too late
signals        what ends a process well; logs: what it says
"""
