"""The same as `jaxrl-lm label-steps`: see `--help` for every option."""

import sys

from jaxrl_lm.cli import main

main(["label-steps", *sys.argv[1:]])
