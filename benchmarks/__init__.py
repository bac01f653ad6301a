"""Speed of jattn and of other implementations on the named problems of `jattn.testing.cases`."""
