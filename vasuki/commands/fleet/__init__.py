"""`vasuki run --replicas`: one job on several devices of a machine, a process for each.

driver       plans, hands out rows, writes the output; the only one that knows of either
replica      a process: loads the model, runs the rows that it is given
processes    replicas are started, spoken with, and started again when they die
messages     what driver and replicas tell each other
"""
