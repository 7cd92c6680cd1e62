"""vasuki finishes an offline LLM batch first and cheapest, and says beforehand when and for how much.

Follow one request from the top:

    cli            commands
    job            the composition root: a JobConfig becomes a run
    io/            tables in, parts out
    planner/       requests and a machine -> Plan
    engine         the loop: schedule, launch, settle
    scheduler      who runs in the next step
    hf/            kernels; simulator/: a cost model in their place
    report/        what runs took, compared
"""
