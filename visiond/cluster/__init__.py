"""`visiond ray run`: the stages over many machines, by Ray Data. Read running.py first."""
