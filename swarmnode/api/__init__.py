"""What a daemon serves over HTTP: an API that OpenAI's clients speak, and what a page or a monitor reads.

    service       the listening address, for as long as the daemon runs, and what `status` says of it
    connection    one connection: Hypercorn on trio, within limits
    guard         every request before any route: who may ask (access), how much, until when
    app           the routes
    completions   /v1/chat/completions and /v1/completions, whole or as a stream
    schema        their bodies; asking: from those to what the swarm is asked
    answering     the answers as they come; shapes: how each endpoint tells them
    fair_use      whose answer begins next
    served        the model that may be asked for
    views         health, readiness, metrics, and what pages read (seen: not more often than every second)
    token         what requests need that change something
    errors        every refusal, in OpenAI's shape
    limits        every bound with its reason

docs/api.md is the reader's side of it.
"""
