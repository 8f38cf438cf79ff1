"""Runs real vLLM engines with routetrace attached, and compares every row.

`make test-vllm` starts tiny models with random weights on the CPU, in every way that routetrace
attaches, and compares what a trainer reads with what vLLM returns itself, and with a forward pass
of Transformers in float32.

* models.py: the checkpoints, written at run time
* runs.py: which engine runs which scenarios; each run is a process of its own
* engine.py: an engine with routetrace attached, and the requests that it was asked
* scenarios.py, pairs.py, handovers.py, embedded.py, serving.py: what is done to the engines
* routers.py: vLLM's own routers alone, with the padding that CUDA marks
* reference.py: the forward pass of Transformers
* compare.py: the rows, one by one
* report.py: the table
"""
