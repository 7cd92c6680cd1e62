"""Requests to steps. Integers only: the engine knows no model, no clock and no price.

loop         `drain`, the loop, and the seams behind which kernels and cost model are exchanged
scheduler    which rows run in the next step
preemption   which rows make room; admission: which rows may start
queues       rows by status, with what they hold; prefixes: beginnings that they share
policy       how vasuki and its baselines differ
shaping      how padded steps are laid out in calls; rectangles: chunks that share one
settings     what an engine is told before it starts; offload: what moves to the host
depth        which layers live on the host in a batch; depth_control: who decides that
sequence     a request in progress; batch: one step; blocks: who owns which KV memory
"""
