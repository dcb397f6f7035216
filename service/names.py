"""Names of all spans, span attributes, span events and metrics, each with what it says."""

from __future__ import annotations

from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as _gen_ai
from opentelemetry.semconv._incubating.attributes import messaging_attributes as _messaging
from opentelemetry.semconv.attributes import error_attributes as _error

INSTRUMENTATION = "plait.service"
SYSTEM = "kafka"
PROVIDER = "plait"

# Spans. A request has one process span, a child of the producer's span; the others are its children.
SPAN_PROCESS = "process"  # "process <topic>": from the record's arrival to its durable terminal event
SPAN_QUEUE = "queue"  # from arrival until an iteration of the engine first holds the request
SPAN_PREFILL = "prefill"  # from there to the first token
SPAN_DECODE = "decode"  # from the first token to the last
SPAN_PUBLISH = "publish"  # from handing over the first event to the acknowledgement of the last

# Span events.
EVENT_PREEMPTED = "plait.preempted"  # the engine took the request's place away; it goes on later
EVENT_ENGINE_RESTARTED = "plait.engine_restarted"  # the engine crashed; the request was resumed in a new one

# Span attributes of OpenTelemetry's messaging conventions.
MESSAGING_SYSTEM = _messaging.MESSAGING_SYSTEM
MESSAGING_OPERATION_TYPE = _messaging.MESSAGING_OPERATION_TYPE
MESSAGING_OPERATION_NAME = _messaging.MESSAGING_OPERATION_NAME
MESSAGING_DESTINATION = _messaging.MESSAGING_DESTINATION_NAME
MESSAGING_PARTITION = _messaging.MESSAGING_DESTINATION_PARTITION_ID
MESSAGING_OFFSET = _messaging.MESSAGING_KAFKA_OFFSET
MESSAGING_GROUP = _messaging.MESSAGING_CONSUMER_GROUP_NAME
MESSAGING_BODY_SIZE = _messaging.MESSAGING_MESSAGE_BODY_SIZE
MESSAGING_TOMBSTONE = _messaging.MESSAGING_KAFKA_MESSAGE_TOMBSTONE
MESSAGING_MESSAGE_ID = _messaging.MESSAGING_MESSAGE_ID  # the request id
MESSAGING_BATCH_COUNT = _messaging.MESSAGING_BATCH_MESSAGE_COUNT  # events published

# Span attributes of OpenTelemetry's conventions for generative AI, and for errors.
GEN_AI_OPERATION = _gen_ai.GEN_AI_OPERATION_NAME  # chat or text_completion
GEN_AI_PROVIDER = _gen_ai.GEN_AI_PROVIDER_NAME
GEN_AI_REQUEST_MODEL = _gen_ai.GEN_AI_REQUEST_MODEL
GEN_AI_RESPONSE_MODEL = _gen_ai.GEN_AI_RESPONSE_MODEL
GEN_AI_RESPONSE_ID = _gen_ai.GEN_AI_RESPONSE_ID
GEN_AI_MAX_TOKENS = _gen_ai.GEN_AI_REQUEST_MAX_TOKENS
GEN_AI_TEMPERATURE = _gen_ai.GEN_AI_REQUEST_TEMPERATURE
GEN_AI_TOP_P = _gen_ai.GEN_AI_REQUEST_TOP_P
GEN_AI_TOP_K = _gen_ai.GEN_AI_REQUEST_TOP_K
GEN_AI_SEED = _gen_ai.GEN_AI_REQUEST_SEED
GEN_AI_CHOICES = _gen_ai.GEN_AI_REQUEST_CHOICE_COUNT
GEN_AI_STREAM = _gen_ai.GEN_AI_REQUEST_STREAM
GEN_AI_FINISH_REASONS = _gen_ai.GEN_AI_RESPONSE_FINISH_REASONS
GEN_AI_INPUT_TOKENS = _gen_ai.GEN_AI_USAGE_INPUT_TOKENS
GEN_AI_CACHED_TOKENS = _gen_ai.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS
GEN_AI_OUTPUT_TOKENS = _gen_ai.GEN_AI_USAGE_OUTPUT_TOKENS
ERROR_TYPE = _error.ERROR_TYPE  # an error code of the wire, or "dead_letter"

# plait's own span attributes.
OUTCOME = "plait.outcome"  # one of the OUTCOME_* below
PRIORITY = "plait.priority"  # 0..9
TENANT = "plait.tenant"
EPOCH = "plait.epoch"  # the consumer group's generation
CHOICE = "plait.choice"  # which of the n sequences a queue, prefill or decode span is about
PREEMPTIONS = "plait.preemptions"  # over all choices
RESUMED_TOKENS = "plait.resumed_tokens"  # published by an earlier worker, and continued
PREEMPTION = "plait.preemption"  # of EVENT_PREEMPTED: swap (its KV was kept in the CPU pool) or recompute
DEAD_LETTER_REASON = "plait.dead_letter.reason"

# Outcomes of a request: the value of OUTCOME, and of the label `outcome` of plait_requests_total.
OUTCOME_DONE = "done"  # answered in full
OUTCOME_CANCELLED = "cancelled"  # by the control topic
OUTCOME_ERROR = "error"  # answered with an error event
OUTCOME_ACKNOWLEDGED = "acknowledged"  # delivered again, but answered before: only its offset was open
OUTCOME_DEAD_LETTER = "dead_letter"  # nobody could be answered: in the dead-letter topic
OUTCOME_REVOKED = "revoked"  # the partition went to another worker, which answers
OUTCOME_HANDED_OVER = "handed_over"  # left at shutdown for the next worker

# Metrics.
REQUESTS = "plait_requests_total"  # requests that ended, by outcome and error code
PROMPT_TOKENS = "plait_prompt_tokens_total"  # tokens of the prompts of requests that ended
COMPLETION_TOKENS = "plait_completion_tokens_total"  # tokens generated for requests that ended
QUEUE_SECONDS = "plait_queue_seconds"  # arrival to first iteration
TTFT_SECONDS = "plait_time_to_first_token_seconds"  # arrival to first token
TPOT_SECONDS = "plait_time_per_output_token_seconds"  # mean over a request's tokens after the first
REQUEST_SECONDS = "plait_request_seconds"  # arrival to last token
SLO_REQUESTS = "plait_slo_total"  # requests with an objective, by objective and whether it was met
IN_FLIGHT = "plait_in_flight_requests"  # read and not yet answered, by lane
IN_FLIGHT_BYTES = "plait_in_flight_bytes"  # of their messages, by lane
PAUSED = "plait_paused_partitions"  # not read at the moment because enough is in flight, by lane
ASSIGNED = "plait_assigned_partitions"  # that this worker reads, by lane
LAG = "plait_consumer_lag"  # records behind the last one known at the broker, by partition
COMMITS = "plait_commits_total"  # offset commits, by result: ok, dropped, failed
OUT_OF_RANGE = "plait_out_of_range_total"  # positions that were not in the log any more, by what was done
REBALANCES = "plait_rebalances_total"  # assignments received
DEAD_LETTERS = "plait_dead_letters_total"  # messages put into the dead-letter topic, by reason
EVENTS = "plait_events_total"  # events handed to the producer, by type
PUBLISH_ERRORS = "plait_publish_errors_total"  # failed sends, by whether they were tried again
RESPONSE_TOPICS = "plait_response_topics_total"  # response topics, by action: created, removed
CONTROL_MESSAGES = "plait_control_messages_total"  # read from the control topic, by kind
ENGINE_RUNNING = "plait_engine_running"  # sequences in the batch
ENGINE_WAITING = "plait_engine_waiting"  # sequences that wait for a place in it
ENGINE_FREE_BLOCKS = "plait_engine_free_blocks"  # of the KV cache
ENGINE_TOTAL_BLOCKS = "plait_engine_total_blocks"  # of the KV cache
ENGINE_ITERATIONS = "plait_engine_iterations_total"
ENGINE_GENERATED = "plait_engine_generated_tokens_total"
ENGINE_PREEMPTIONS = "plait_engine_preemptions_total"
ENGINE_REFUSED = "plait_engine_refused_total"  # or given up as overloaded; by `reason`, what could not be met
ENGINE_FORECAST_ERROR = "plait_engine_forecast_error_seconds"  # mean |forecast - actual| to the first token
ENGINE_SWAPS = (
    "plait_engine_swaps_total"  # preemptions after which what was computed was kept in the CPU pool
)
ENGINE_SWAPPED_BLOCKS = "plait_engine_swapped_blocks_total"  # KV blocks copied, by direction: out, in
ENGINE_HOST_BLOCKS = "plait_engine_host_blocks"  # of the CPU pool, by state: used, free
ENGINE_PREFIX_TOKENS = (
    "plait_engine_prefix_tokens_total"  # looked up in the prefix cache, by result: hit, miss
)
ENGINE_RESTARTS = "plait_engine_restarts_total"  # after crashes
ENGINE_PREDICTION_ERROR = (
    "plait_engine_prediction_error"  # of iteration times, relative, a mean of the last ones
)
