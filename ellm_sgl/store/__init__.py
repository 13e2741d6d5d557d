"""KV on disk: full blocks, found again by their tokens after a restart.

```
 folder/lock                        held by the server that uses the folder
 folder/<fingerprint>/blocks        slots of one block each
 folder/<fingerprint>/records       of each slot: which block is in it, and a checksum of that
```

A fingerprint stands for whatever a block's KV depends on besides its tokens. No SGLang and no torch
in here.
"""

from ellm_sgl.store.chain import Chain
from ellm_sgl.store.folder import StoreFolder, check_folder
from ellm_sgl.store.index import StoreFullError
from ellm_sgl.store.store import READ_BYTES, BlockStore, Bytes, Totals, most_buffered

__all__ = [
    "READ_BYTES",
    "BlockStore",
    "Bytes",
    "Chain",
    "StoreFolder",
    "StoreFullError",
    "Totals",
    "check_folder",
    "most_buffered",
]
