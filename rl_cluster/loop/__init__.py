"""The loop: protocols in, trained steps out; it runs on Ray, in one process and on fakes alike."""
