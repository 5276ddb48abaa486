"""visiond as a library: `visiond.engine` runs the stages of a configuration without the daemon.
The daemon itself is the package `daemon`, the stages are the package `stages`."""
