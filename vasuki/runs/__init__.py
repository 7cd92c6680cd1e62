"""A job becomes a run, or is planned.

run              the only root of a run; watch: a run for each file that arrives
verify           whether rows of a finished run are what the job gives
results          what comes back from workers: rows, tokens and steps
opening          a job's input and output, before there is a model
ignored          keys that a policy would ignore
options          how to run a job this time; signals: SIGTERM and the like, which stop it
rows/            a table's rows, rows that arrive, files that arrive
workers/         a model here, or replicas: processes, or actors of a Ray cluster
observers/       progress, metrics, the trace, the watchdog, the deadline
planning         `vasuki plan` and `simulate`, without a model; renting: which cards to rent
workload         what has to run: lengths of a job's requests, the shape of its model
placement        a job's model on the machine that it is planned for and runs on
uncertainty      what knowing all lengths would have saved
manifests        every manifest, built once
"""
