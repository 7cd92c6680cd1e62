"""What observes a run while it lasts.

progress    what a person sees
metrics     figures for Prometheus
tracer      steps into the trace
watchdog    warns of steps that take far too long
deadline    warns of a run that will be late
"""
