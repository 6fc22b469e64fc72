"""The fast path of checks, in C++: programs that answer yes, no, or cannot tell.

`program` is what such a check is made of, `extension` whether it can be run here, `check.cpp` what runs it.
"""
