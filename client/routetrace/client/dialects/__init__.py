"""What trainers and engines call routing, each in its own words: one module for each of them.

    trace = client.get("g0-s0", wait=60)
    sample.rollout_routed_experts = slime.rollout_routed_experts(trace)

Every function takes the rows of one sample: a `RoutingTrace` from position 0 on, or one of the
`SampleRows` that `SampleRows.split` makes of a fetched plan, whose samples may be joined of several
requests. They return numpy arrays, which torch takes as they are.

None of these formats says which rows are there, except where a module says so. So a row that is
missing is an error: a filler would be replayed, and trained on. The last token of a sample has no
row; what stands in its place, and in padding, is the framework's own filler, as no token after it
depends on it.
"""

from routetrace.client.dialects._sample import SampleRows

__all__ = ["SampleRows"]
