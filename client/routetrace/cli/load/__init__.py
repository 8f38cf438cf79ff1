"""What `routetrace bench load` does: simulated engines and trainers against a real server.

* plan.py: what was asked for: the model, the mix of requests, steps, readers
* rows.py: the truth: the row of a position, from a seed
* blocks.py: KV blocks with a prefix cache
* sessions.py: requests, and which pass computed each of their rows
* engine.py: steps of an engine, and what its capture agent is told
* agents.py: the process of an engine, which is paced and counted
* compare.py: what was read, against the truth
* readers.py: the process of a trainer, which reads and compares
* children.py: processes, and the lines that they and the command say to each other
* totals.py: counters and latencies, added up
* run.py: all of it, in order
* verdict.py: what is wrong
* report.py: what people and programs see
"""
