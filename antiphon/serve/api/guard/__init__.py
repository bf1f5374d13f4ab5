"""What a request passes before a route sees it: connections and their deadlines, strict HTTP, hosts and origins, the
limits on bodies. Skip it at a first reading: a route calls `body.read_request` and gets a validated request."""
