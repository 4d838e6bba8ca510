//! Real checkpoints through gRPC: greedy tokens equal the reference, whoever shares the batch.

use std::path::PathBuf;

use super::harness::{config, start_model};
use crate::config::WeightDtype;

pub(super) fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tiny").join(name)
}

fn golden(name: &str) -> (Vec<u32>, Vec<u32>) {
    let text = std::fs::read_to_string(fixture(name).join("golden.json")).unwrap();
    let numbers = |key: &str| {
        let start = text.find(&format!("\"{key}\"")).unwrap();
        let list = &text[start..][text[start..].find('[').unwrap() + 1..];
        list[..list.find(']').unwrap()].split(',').map(|number| number.trim().parse().unwrap()).collect()
    };
    (numbers("prompt"), numbers("greedy"))
}

#[tokio::test]
async fn greedy_tokens_equal_the_reference_alone_batched_and_with_prefix_hits() {
    for name in ["llama", "gemma3_text"] {
        let (prompt, expected) = golden(name);
        let mut config = config();
        config.model = fixture(name);
        config.dtype = WeightDtype::F32;
        config.threads = 1;
        config.n_blocks = Some(64);
        // Small, so that prompts are computed in chunks beside decoding neighbours.
        (config.max_running, config.token_budget) = (4, 16);
        let worker = start_model(config).await;
        let n = expected.len() as u32;
        assert_eq!(worker.generate(&worker.request(&prompt, n)).await.unwrap(), (expected.clone(), 0), "{name}");
        let neighbours: Vec<_> = (0..6_u32)
            .map(|index| {
                let prompt: Vec<u32> = (0..20 + index * 7).map(|i| (i * 11 + index) % 250).collect();
                let mut request = worker.request(&prompt, 30);
                request.sampling.temperature = 1.0;
                request.sampling.repetition_penalty = 1.1;
                request.logprobs = Some(3);
                request
            })
            .collect();
        let request = worker.request(&prompt, n);
        let (answered, others) = tokio::join!(
            worker.generate(&request),
            futures::future::join_all(neighbours.iter().map(|neighbour| worker.generate(neighbour)))
        );
        let (tokens, cached) = answered.unwrap();
        assert_eq!(tokens, expected, "{name}");
        assert_eq!(cached, (prompt.len() as u32 - 1) / 16 * 16, "{name}");
        for (neighbour, batched) in neighbours.iter().zip(others) {
            let mut alone = neighbour.clone();
            alone.id = worker.request(&prompt, 1).id;
            assert_eq!(worker.generate(&alone).await.unwrap().0, batched.unwrap().0, "{name}: batch changes a token");
        }
        worker.at_rest().await;
        worker.shut_down();
        worker.ended().await.unwrap();
    }
}
