"""Routing in the formats of trainers and engines, one module each.

    trace = client.get("g0-s0", wait_for="end", timeout=60)
    sample.rollout_routed_experts = slime.rollout_routed_experts(trace)

Functions take the rows of one sample: a `Trace` from position 0 on, or `SampleRows` from
`Rows.per_sample` of a fetched plan, whose samples may combine several requests. They return numpy
arrays that torch accepts directly.

Unless a module says otherwise, its format cannot mark missing rows. A missing row is an error then,
as a filler would be replayed and trained on. The last token of a sample has no row; it and padding
get the filler of the framework, as no later token depends on them.
"""

from routetrace.client.samples import SampleRows

__all__ = ["SampleRows"]
