"""Who looks at a run while it lasts.

progress    what a person sees
metrics     figures for Prometheus
tracer      steps into the trace
watchdog    tells of steps that take far too long
deadline    tells of a run that will be late
"""
