"""Rows of public data in their own layouts, and files of them."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

GSM8K = [  # the layout of openai/gsm8k
    {"question": "What is 48 + 24?", "answer": "Half of 48 is 48/2 = <<48/2=24>>24.\n48+24 = <<48+24=72>>72.\n#### 72"},
    {"question": "What is 1000 + 600?", "answer": "It is $<<1000+600=1600>>1,600.\n#### 1,600"},
    {"question": "What is 3 - 5?", "answer": "3 - 5 = -2\n#### -2"},
]
MESSAGES = [{"role": "system", "content": "Think."}, {"role": "user", "content": "1+1?"}]
OPENR1 = [  # the layout of Elliott/Openr1-Math-46k-8192
    {
        "data_source": "openr1",
        "prompt": [MESSAGES[0], {"role": "user", "content": f"{i}+1?"}],
        "target": [{"role": "assistant", "content": f"<think>\n{i}.</think>\n\\boxed{{{i + 1}}}"}],
        "ability": "math",
        "reward_model": {"ground_truth": str(i + 1), "style": "rule"},
        "extra_info": {"index": i, "split": "default"},
    }
    for i in (0, 1, 2, 1)
]


def write(folder: Path, rows: list[dict[str, Any]], name: str) -> str:
    pq.write_table(pa.Table.from_pylist(rows), folder / name)
    return str(folder / name)
