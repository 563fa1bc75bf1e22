"""Checked settings and a machine in; sizes, memory, placement and threads, as a plan, out."""
