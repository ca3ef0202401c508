import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported: models are made here, none is asked for
