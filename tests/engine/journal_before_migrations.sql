BEGIN TRANSACTION;
CREATE TABLE checkpoints (
	policy_id VARCHAR(64) NOT NULL,
	checkpoint_id VARCHAR(64) NOT NULL,
	version INTEGER NOT NULL,
	seq INTEGER NOT NULL,
	replay_from_seq INTEGER NOT NULL,
	created_at FLOAT NOT NULL,
	size_bytes INTEGER NOT NULL,
	PRIMARY KEY (policy_id, checkpoint_id)
);
INSERT INTO "checkpoints" VALUES('p','c',1,2,2,3.0,8);
CREATE TABLE operations (
	operation_id VARCHAR(128) NOT NULL,
	policy_id VARCHAR(64) NOT NULL,
	kind VARCHAR(32) NOT NULL,
	seq INTEGER,
	request_id VARCHAR(256),
	payload_hash VARCHAR(64) NOT NULL,
	command TEXT,
	body_digest VARCHAR(64) NOT NULL,
	state VARCHAR(16) NOT NULL,
	"plan" TEXT,
	result TEXT,
	version INTEGER,
	weights_digest VARCHAR(64) NOT NULL,
	created_at FLOAT NOT NULL,
	started_at FLOAT,
	finished_at FLOAT,
	PRIMARY KEY (operation_id),
	UNIQUE (policy_id, seq),
	UNIQUE (policy_id, request_id)
);
INSERT INTO "operations" VALUES('p.create','p','create_policy',NULL,NULL,'',NULL,'','applied',NULL,'{"$":"EmptyResult"}',NULL,'',1.0,NULL,2.0);
INSERT INTO "operations" VALUES('p.1','p','update',1,NULL,'hash1',NULL,'body1','applied',NULL,'{"$":"StepResult","report":{"$":"StepReport","attention_pair_reduction":0.0,"canary":null,"clip_fraction_high":0.0,"clip_fraction_low":0.0,"dropped_stale":0,"dropped_truncated":0,"dropped_zero_variance":0,"entropy":0.0,"grad_norm":null,"hardware_mfu":null,"kl":null,"logical_mfu":null,"loss":0.5,"num_groups":0,"num_micro_batches":0,"num_sequences":0,"packed_tokens":0,"peak_memory_bytes":0,"policy_gradient_loss":0.0,"ratio_max":0.0,"replicated_tokens":0,"reward_mean":null,"sampler_gap_max":null,"sampler_kl":null,"seconds":{"$":"PhaseSeconds","backward":0.0,"forward":0.0,"optimizer":0.0,"plan":0.0,"publish":0.0},"skipped":false,"staleness_max":null,"staleness_mean":null,"token_reduction":0.0,"tokens_per_second":0.0,"trained_tokens":0,"warnings":[]},"version":1}',1,'',1.0,NULL,9.0);
INSERT INTO "operations" VALUES('p.2','p','save_checkpoint',2,NULL,'hash2','{"$":"UpdateCommand","body_digest":"2f12af61dbc060e65874a9201e54a045491a53d4574f1e1720dc12993e1194eb","expected_version":null,"loss":{"$":"LossRequest","advantage":null,"clip_high":null,"clip_low":null,"correction":null,"drop_zero_variance_groups":null,"dual_clip":null,"entropy_coefficient":0.0,"kind":"grpo","kl":null,"old_logprobs":null,"overlong":null,"router_aux_loss_coefficient":0.0,"shared_tokens":"sum","staleness":null,"token_weight":null},"optim":{"$":"OptimRequest","divide_by":null,"divide_constant":null,"learning_rate":0.5,"max_grad_norm":null,"weight_decay":null}}','body2','applied',NULL,'{"$":"CheckpointInfo","checkpoint_id":"c","created_at":3.0,"replay_from_seq":2,"seq":2,"size_bytes":8,"version":1}',1,'',1.0,NULL,9.0);
INSERT INTO "operations" VALUES('p.3','p','forward_backward',3,NULL,'hash3','{"$":"ForwardBackwardCommand","body_digest":"078a7ef52666ee03b520c06610a86626b007a9c11fdce5f0834591b5cf55678c","expected_version":null,"loss":{"$":"LossRequest","advantage":null,"clip_high":null,"clip_low":null,"correction":null,"drop_zero_variance_groups":null,"dual_clip":null,"entropy_coefficient":0.0,"kind":"grpo","kl":null,"old_logprobs":null,"overlong":null,"router_aux_loss_coefficient":0.0,"shared_tokens":"sum","staleness":null,"token_weight":null}}','body3','applied',NULL,'{"$":"StepResult","report":{"$":"StepReport","attention_pair_reduction":0.0,"canary":null,"clip_fraction_high":0.0,"clip_fraction_low":0.0,"dropped_stale":0,"dropped_truncated":0,"dropped_zero_variance":0,"entropy":0.0,"grad_norm":null,"hardware_mfu":null,"kl":null,"logical_mfu":null,"loss":0.5,"num_groups":0,"num_micro_batches":0,"num_sequences":0,"packed_tokens":0,"peak_memory_bytes":0,"policy_gradient_loss":0.0,"ratio_max":0.0,"replicated_tokens":0,"reward_mean":null,"sampler_gap_max":null,"sampler_kl":null,"seconds":{"$":"PhaseSeconds","backward":0.0,"forward":0.0,"optimizer":0.0,"plan":0.0,"publish":0.0},"skipped":false,"staleness_max":null,"staleness_mean":null,"token_reduction":0.0,"tokens_per_second":0.0,"trained_tokens":0,"warnings":[]},"version":1}',1,'',1.0,NULL,9.0);
INSERT INTO "operations" VALUES('p.4','p','forward_backward',4,NULL,'hash4','{"$":"ForwardBackwardCommand","body_digest":"dc57f682856f37c985fac45c06d7d9b188ace0081e44ca22b4fd29db945b1a72","expected_version":null,"loss":{"$":"LossRequest","advantage":null,"clip_high":null,"clip_low":null,"correction":null,"drop_zero_variance_groups":null,"dual_clip":null,"entropy_coefficient":0.0,"kind":"grpo","kl":null,"old_logprobs":null,"overlong":null,"router_aux_loss_coefficient":0.0,"shared_tokens":"sum","staleness":null,"token_weight":null}}','body4','applying','{"plan":{"micro_batches":[1]}}',NULL,NULL,'',1.0,5.0,NULL);
CREATE TABLE policies (
	policy_id VARCHAR(64) NOT NULL,
	spec TEXT NOT NULL,
	state VARCHAR(16) NOT NULL,
	version INTEGER NOT NULL,
	max_version INTEGER NOT NULL,
	next_seq INTEGER NOT NULL,
	token INTEGER NOT NULL,
	created_at FLOAT NOT NULL,
	info TEXT,
	published TEXT NOT NULL,
	PRIMARY KEY (policy_id)
);
INSERT INTO "policies" VALUES('p','{"$":"PolicySpec","attention_backend":"","deterministic":true,"keep_versions":2,"micro_batch_tokens":64,"model":{"$":"ModelSpec","base":{"$":"PresetBase","name":"tiny"},"dtype":"float32","seed":1,"tuning":{"$":"FullTuning"}},"num_workers":1,"on_changed_numerics":"stop","optimizer":{"$":"AdamWConfig","beta1":0.9,"beta2":0.95,"eps":1e-08,"weight_decay":0.01},"policy_id":"p","publish":{"$":"PublishConfig","every_n":1,"kind":"every"},"recovery":"fail","reference":"none","sequencing":"client"}','ready',1,1,5,1,1.0,'{"$":"ModelInfo","attention_backend":"fake","max_sequence_tokens":64,"num_parameters":1,"num_trainable_parameters":1,"vocab_size":256}','[0, 1]');
CREATE INDEX operations_by_state ON operations (policy_id, state);
COMMIT;
