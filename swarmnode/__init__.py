"""The daemon around the pure parts: network, storage, services and command lines. The only package that awaits.

Start with `daemon` (everything that runs, on one page), then `leader` and `worker`.

    cli               swarmnode and swarmctl
    daemon            the nursery tree; node: a member's life, participant: all that it runs in its swarm
    leader, worker    the two roles; candidate: who may lead; named_swarm: where the configuration names who does
    net               libp2p behind one interface, and the same interface without a network
    shards            experts from peer to peer, and their cache on disk
    leadership        who leads, as the other parts see it
    backbone          elections, and what every member hears of them
    asker             prompts from any peer to the leader; kept_requests: the last ones of this node; verify: whether
                      their answers hold
    handlers, status  what swarmctl may ask of a daemon (control, control_client: the socket in between;
                      status_service: between nodes, mesh: what adverts add;
                      explaining: one peer; swarm_answers: in a swarm)
    api               the same over HTTP, for OpenAI's clients, pages and monitors
    models            the models that this node knows; model_check judges one before it is added
    model_keeper      fetches the one that the swarm serves; model_choice says which one a leader serves;
                      fetch_model: all of it, in one file

    wire, limits                                        frames, and every bound with its reason
    expert_messages, member_messages, prompt_messages   what the frames say (shards.messages: the fourth; prompt_frames:
                                                        the last of them to the byte; chat_messages: chats and tools)
    pinger                                              who still answers

    compute                                             the expert backend that the configuration names
    machine_parts                                       all that a daemon has of its machine
    availability                                        power, network, use of the machine: whether to work now
    draining                                            what follows, or what the user asks: letting go of experts
    measuring, measure_child, measured                  what it really does: asked of its kernels, in a child process
    self_description                                    what this node's advert says
    config, paths, logs, identity, durable, threads     what a daemon has on its machine (config_sections, printable,
                                                        version, machine, log_file, files_limit, http_address)
    doctor                                              what is wrong with all of that, and the mend
    local_experts, local_swarm, undivided, demo, bench  whole swarms on one machine, and llama.cpp beside them
    top                                                 what two statuses say of the time between them
    outline, predicting                                 a swarm without names, and what this machine would hold in it
    kernels                                             kernels of other builds, other processors and Vulkan
    experiment                                          cheats, and whether audits find them
    equivalence                                         how closely two backends or peers agree
    comparing                                           what peers compute for one another, so that it can be told
    local_founding                                      the records of such a swarm
    service                                             the daemon under systemd or launchd
    bootstrap                                           set-up, on the standard library alone

Nothing is imported here: commands must start at once.
"""
