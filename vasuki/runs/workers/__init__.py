"""What computes the rows of a run: a model in this process, or a driver and replicas that have one each.

workers       what a run needs of them
here          the model in this process, called directly
driver        replicas are planned for, get rows, and are heard
replica       loads the model, runs the rows that it is given
rows_on_loan  the rows that a replica was given, as its loop sees them
device        a model on a device of this process, and how rows are computed with it
processes     replicas are started, spoken with, and started again when they die
messages      what driver and replicas tell each other, and what the driver needs of the code that starts them
ray/          replicas of a Ray cluster
"""
