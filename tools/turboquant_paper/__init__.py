"""The measurements behind docs/turboquant.md; run by tools/reproduce_turboquant.py."""
