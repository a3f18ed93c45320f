"""The stages of a run, one file each. `pipeline.py` walks them in order."""
