"""Ray, and only here: `vasuki run --on ray`.

run          what a run starts its replicas with
actors       replicas are started as actors, spoken with, and placed on nodes as those come and go
nodes        a cluster is found, and asked what its nodes have room for
actor        what an actor holds: a replica in a thread; knows nothing of Ray
"""
