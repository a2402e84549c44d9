"""Running kernels: llama.cpp for the trunk, ggml for experts, NumPy to check both; and the files that models come in.

A model's file
    gguf_file        a GGUF, single or split, checked before llama.cpp sees it (gguf_header, gguf_checks, gguf_types)
    expert_tensors   which tensors are routed experts, and what shapes they have
    trunk_file       the same file with its experts shrunk to width 1
    whole_file       the way back: trunk and experts as one file again
    manifest         a model by content: trunk, experts, programs, hashes (canonical reads it from a peer)
    expert_source    experts' bytes out of the model's own file, and their hashes
    add_model        from a file to a folder that can be served, in a child process (child, learn)
    check_trunk      a trunk that came from other peers, before the daemon loads it
    atomic_file      files that are complete or absent

Experts
    program          what one expert computes, in portable form
    capture, replay  from llama.cpp's graph to a program, from a program to a ggml graph
    experts          the ExpertBackend protocol, and ggml's implementation of it
    numpy_reference  another one, in float64, float32 or float16 (numpy_functions)
    switched         the reference with switches, to tell what a difference comes from; sum_orders: how kernels add
    row_operators    softmax and RMS norm, which no expert computes but every trunk does
    activations      rows rounded once, by the leader, where that is exact

Kernels of other builds
    variants         which ones there can be, and what a processor needs for them
    variant_process  experts whose kernels run in a process of their own (variant_child, variant_frames)

llama.cpp and ggml
    ggml, device     ctypes over the installed libraries; one compute device
    llama            a model and its context; vocabulary has its tokens and chat template
    grammar          which tokens a grammar or JSON schema allows next
                     (tool_grammar: calls of tools; chat_template: how the model is told of them)
    moe_hook         stops llama.cpp at each MoE layer (sum_point: where it adds the experts up)
    trace            what passes through a decode, layer by layer; routers made to choose as told
    weight_layout    which weights may be repacked without touching batch invariance

Models made here
    demo_model       the demo model (demo_recipe, paired_experts, dense_forward, q4_1; demo_measure measures it)
    synthetic        real shapes with random weights, for measuring speed (byte_vocabulary is their tokenizer)

What a backend does, measured
    measure          precision, batch invariance, repeatability, numeric class, speed (measurement_cache keeps it)
    numeric_class    a fingerprint of a backend's arithmetic, from inputs on which kernels part (class_inputs)
    probe_weights    layers made for measuring, byte by byte
    crafted_rows     activations that tell in service how a peer accumulates
    coarse_experts   rows under every coarser arithmetic that is known (known_roundings: of activations)

Nothing is imported here, since half of these modules load llama.cpp. No other package may load it.
"""
