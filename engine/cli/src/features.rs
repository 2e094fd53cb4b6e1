//! `nacre features`: the features of this program and their maturity. Does not call the daemon.

use clap::Args;

use super::{Failure, output};
use nacre_engine::features::{self, FEATURES};

#[derive(Debug, Args)]
#[command(
    after_help = "stable: tested with stock Linux hosts. preview: complete, tested with simulated devices or \
        with Nacre at both ends. experimental: not tested on its hardware, or incomplete."
)]
pub(crate) struct FeaturesArgs {
    /// Print JSON for programs instead of a table for people
    #[arg(long)]
    json: bool,
    /// Print the reference of all features, in Markdown
    #[arg(long)]
    reference: bool,
}

pub(crate) fn run(args: FeaturesArgs) -> Result<(), Failure> {
    if args.reference {
        return output::line(features::markdown().trim_end());
    }
    if args.json {
        let all = serde_json::to_value(FEATURES).expect("features are plain data");
        return output::json(&all);
    }
    let rows = FEATURES.iter().map(|feature| {
        vec![
            feature.name.to_owned(),
            feature.maturity.to_string(),
            feature.since.to_owned(),
            feature.about.to_owned(),
        ]
    });
    output::table(&["feature", "maturity", "since", "about"], rows)
}
