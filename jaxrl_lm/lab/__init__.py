"""The arithmetic lab: a task small enough that a transformer learns it from nothing on a laptop in minutes.

`task.py` makes problems, demonstrations and verifiers (no jax), `tokenizer.py` a character tokenizer, `figure.py` the
picture of a run. The run itself, `run.py`, is what `make quickstart` starts.
"""
