"""miles (read: radixark/miles at 31f1ca96).

`Sample.rollout_routed_experts` is an int32 array [tokens - 1, num_layers, top_k]. miles refuses
another dtype on sending samples, and another number of rows in `Sample.validate` and
`fill_replay_data`. It adds rows of -1 for the last token and padding. A router replaces -1 by
`arange(top_k)`: it is a filler and does not select the live router.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from routetrace.client import _arguments as check
from routetrace.client.samples import SampleRows
from routetrace.client.trace import Trace
from routetrace.trainers.dialects._sample import array_of, require_valid


def rollout_routed_experts(
    rows: Trace | SampleRows, *, missing: Literal["raise", "filler"] = "raise"
) -> npt.NDArray[np.int32]:
    """Return `Sample.rollout_routed_experts`.

    Args:
        rows: rows of a sample of N tokens.
        missing: "filler" puts -1 in missing cells, which miles trains as experts 0 .. top_k - 1:
            for samples with masked loss.

    Returns:
        int32 [N - 1, num_hidden_layers, top_k]; zeros in dense layers.

    Raises:
        Incomplete: if a cell is missing, and `missing` is "raise".
    """
    sample = SampleRows.of(rows)
    check.choice("missing", missing, ("raise", "filler"))
    if missing == "raise":
        require_valid(sample, "miles")
    return array_of(sample, np.int32, "hidden", missing=-1)
