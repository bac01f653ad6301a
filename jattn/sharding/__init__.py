"""How attention is spread over several devices: batch and heads stay where they are, and nothing is gathered.

Except where the heads are cut into a number of parts that does not divide the number of key/value heads, which is not
1 either: then the heads are gathered. Key/value heads that are repeated up to the size of the mesh axis avoid it.
"""
