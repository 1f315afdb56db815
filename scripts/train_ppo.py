"""The same as `jaxrl-lm ppo`: see `--help` for every option."""

import sys

from jaxrl_lm.cli import main

main(["ppo", *sys.argv[1:]])
