"""The fast path of checks, in C++: programs that answer yes, no, or cannot tell.

`program` is what such a check is made of, `extension` whether it can be run here. In C++: `module.cpp` is what Python
sees, `program.cpp` takes programs, `run.cpp` runs them, `reading.cpp` reads tensors and objects for it.
"""
