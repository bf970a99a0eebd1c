"""Published figures (arXiv 2609.24698: DeepSeek-V4-Flash, 8 GPUs) that a report sets beside its own."""

from __future__ import annotations

SOURCE = "arXiv 2609.24698, DeepSeek-V4-Flash, 8 GPUs"

ACCEPTED_D8 = {"gsm8k": (2.836, 3.406), "mbpp": (2.68, 3.16), "sharegpt": (2.39, 2.83)}
"""Accepted length at D=8, (linear, tree); the values of mbpp and sharegpt are rounded in the source."""

MEAN_GAIN = {5: 0.110, 6: 0.144, 7: 0.171, 8: 0.186}
"""Mean relative gain in accepted length by D."""

THROUGHPUT_FROM_D6 = (1.08, 1.10)
"""Range of tree/linear throughput from D=6 on; at D=5 it is near 1."""

BEST_THROUGHPUT = 1.185
BEST_CELL = "sharegpt, s3_k2_d6, batch 4"
