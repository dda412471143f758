"""The page that report.py writes: what a run, an evaluation or a laboratory left, and every turn that was kept."""
