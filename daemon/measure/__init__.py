"""`visiond bench` and `visiond tune`: a throwaway daemon, measured at work."""
