"""How attention is spread over several devices: batch and heads stay where they are, and nothing is gathered.

Except where the number of devices over which the heads are cut neither divides that of the key/value heads nor is a
multiple of it: then the heads are gathered, or cut over fewer devices. Key/value heads that are repeated avoid it.
"""
