"""Many processes as one run: who they are, barriers, what must be the same on all, who is gone."""
