"""Selection of the largest elements on a GPU, as `fusion_rt.kernels.selection` does on the CPU, on arrays that are in
the memory of a GPU, by Numba-CUDA.

`selection` has the functions, `_kernels` the code that runs on the device, `side` the use of them on torch tensors
beside training. Importing this package loads none of them, and only `fusion_rt.torch.core.cuda_side` does: `numba.cuda`
is for workers that have a GPU. It comes from the package `numba-cuda`, which the extras `fusion_rt[cuda12]` and
`[cuda13]` install.

The tests run the functions in Numba's simulator, which has no warps, and compile all kernels to PTX, those with warps
too, where NVIDIA's compiler is installed. Calls of torch by `side.TorchLayer` are checked there with substitutes only.
`python -m tests.gpu` runs all of it on a GPU; docs/benchmarks.md has the results of one.
"""
