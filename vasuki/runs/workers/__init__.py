"""One job on several devices: a driver, and replicas that are processes of its machine or run in a cluster.

driver        plans, hands out rows, writes the output; the only one that knows of either
replica       loads the model, runs the rows that it is given
rows_on_loan  the rows that a replica was given, as its loop sees them
device        a model on a device of this process, and how rows are computed with it
processes     replicas are started, spoken with, and started again when they die
messages      what driver and replicas tell each other, and what the driver needs of whoever starts them
ray/          replicas of a Ray cluster
"""
