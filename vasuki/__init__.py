"""vasuki runs an offline LLM batch as fast and cheaply as the hardware allows, and predicts time and cost beforehand.

Each room imports only rooms below it in this list:

    commands/     what people type
    runs/         a job becomes a run, or a forecast of one
    report/       what people read about plans and runs
    planner/      what to run, in which order, and what that will take
    simulator/    prices steps: the same loop in virtual time
    hf/           computes steps: transformers models on torch
    io/           tables in, parts out
    machines/     a machine as data, and what a step takes on it
    arrivals/     when rows that arrive start
    engine/       requests to steps: integers only, no model and no price
    models/       a model as data
    base/         what every room stands on: job files, errors, units

`vasuki.ray` is a step of a Ray Data pipeline.
"""
