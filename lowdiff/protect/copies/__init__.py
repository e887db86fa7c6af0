"""Peer memory: whose memory holds what of which node, and when what must be sent is sent."""
