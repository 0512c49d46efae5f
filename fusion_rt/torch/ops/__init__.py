"""The collective operations on tensors, with Horovod's names, arguments and meaning.

The variants of an operation differ in two things. `..._async` returns a handle (an int) at once, for `poll` and
`synchronize`; the others wait. A trailing underscore puts the result in the tensor's place; the others return a new
tensor, leave their input alone, and are differentiable (the ones that wait). `grouped_...` takes several tensors, which
complete together.

Names pair the operations of different ranks. A named operation may be under way once at a time; unnamed ones are paired
in the order in which each rank submits them. Ranks that do not agree about shape, dtype, op or root all get a
`HorovodInternalError` that names the submissions of each rank.

A call that is wrong by itself (a scalar to gather, splits that do not add up, a process set that this rank is not in)
raises `ValueError` on this rank before anything is submitted.
"""
