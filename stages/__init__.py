"""The models: the stages, their weights, and the bin that follows from their answers. Imports nothing of the daemon."""

import logging

from stages.contract import interning

# This is done here because every process of visiond imports this package before it handles files.
if interning.never_frees():
    interning.stop_in_pathlib()

# torchao, which transformers imports where it is installed, uses a deprecated function of torch: two lines in each
# worker's log.
logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
