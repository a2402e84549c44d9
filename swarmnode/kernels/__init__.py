"""Kernels of other builds: ggml compiled for other processors, ARM64 under an emulator, and Vulkan's shaders.

    recipes   what is built, with which flags, and what the machine needs for it
    store     where the results are, by version and flags, and how their processes are started
    build     the steps of `swarmctl kernels build`
    matrix    every kernel against every other: `swarmctl kernels compare`
    mixed     a swarm of workers with different kernels: `swarmctl kernels swarm`
    arm64     an ARM64 Python with its packages, for kernels and whole daemons

What each kernel is called stands in backends/variants.py, how its process is spoken to in backends/variant_process.py.
Nothing here touches the installed packages.
"""
