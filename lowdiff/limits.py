"""Internal limits by plain names: where each constant stands that tests make smaller or shorter.

A module of its own, because it names places of all rooms and loads none of them.
"""

from __future__ import annotations

#: Plain name -> module and constant.
PLACES = {
    "abandon_seconds": "lowdiff.attach.close._ABANDON_SECONDS",
    "copy_late_seconds": "lowdiff.protect.copies.wards._LATE_SECONDS",
    "copy_piece_bytes": "lowdiff.persistence.files.checked_copy._PIECE_BYTES",
    "copy_share_bytes": "lowdiff.persistence.files.checked_copy._SHARE_BYTES",
    "copy_waiting_steps": "lowdiff.protect.copies.wards._MOST_WAITING",
    "device_piece_bytes": "lowdiff.core.devices._PIECE_BYTES",
    "drain_seconds": "lowdiff.commit.storage._DRAIN_SECONDS",
    "finish_seconds": "lowdiff.attach.close._FINISH_SECONDS",
    "fast_replica_elements": "lowdiff.protect.replica.strategy._FAST_ELEMENTS",
    "first_replay_window_bytes": "lowdiff.recovery.replay.replayer._FIRST_WINDOW_BYTES",
    "image_piece_bytes": "lowdiff.recovery.images._PIECE_BYTES",
    "kept_intervals": "lowdiff.protect.gradients.strategy._INTERVALS",
    "lease_look_seconds": "lowdiff.persistence.files.lease._POLL_SECONDS",
    "late_gradient_bytes": "lowdiff.protect.gradients.queue._LATE_BYTES",
    "least_body_steps": "lowdiff.attach.memory._LEAST_STEPS",
    "load_batch_bytes": "lowdiff.recovery.load._BATCH_BYTES",
    "memory_patience_seconds": "lowdiff.recovery.sources.folders._PATIENCE_SECONDS",
    "most_body_steps": "lowdiff.attach.memory._MOST_STEPS",
    "process_check_seconds": "lowdiff.persistence.files.detached_process._CHECK_SECONDS",
    "record_rest_bytes": "lowdiff.protect.memory._SCALAR_BYTES",
    "record_body_bytes": "lowdiff.persistence.format.segment_file._MAX_BODY_BYTES",
    "replay_window_bytes": "lowdiff.recovery.replay.replayer._WINDOW_BYTES",
    "residual_buffer_bytes": "lowdiff.protect.copies.residuals._BUFFER_BYTES",
    "restart_backoff_seconds": "lowdiff.persistence.files.detached_process._BACKOFF_SECONDS",
    "small_run_bytes": "lowdiff.recovery.inspect.inspection._SMALL_BYTES",
    "spread_piece_bytes": "lowdiff.model.ranks._PIECE_BYTES",
    "staging_chunk_bytes": "lowdiff.protect.memory._MIN_CHUNK_BYTES",
    "survivors_seconds": "lowdiff.persistence.writer.main._SURVIVORS_SECONDS",
    "upload_retry_seconds": "lowdiff.persistence.store.uploader._RETRY_SECONDS",
    "waiting_notice_seconds": "lowdiff.commit.queue._NOTICE_SECONDS",
    "weights_group_bytes": "lowdiff.recovery.inspect.weights._GROUP_BYTES",
    "weights_groups": "lowdiff.recovery.inspect.weights._MOST_GROUPS",
    "write_retry_seconds": "lowdiff.persistence.writer.main._RETRY_SECONDS",
}
