//! The options of commands that try to connect more than once.

use std::time::Duration;

use clap::Args;
use nacre_engine_values::time;
use nacre_nvmf::host::PathOptions;
use nacre_nvmf::transport::TransportType;

#[derive(Debug, Clone, Args)]
pub(crate) struct Attempts {
    /// Attempts over RDMA before the fallback, or before giving up; 0: without limit
    #[arg(long, value_name = "N", default_value_t = defaults().connection_retries)]
    pub retries: u32,
    /// Pause between these attempts
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = time::parse)]
    pub retry_delay: Duration,
    /// Longest time of one attempt to connect
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = time::parse)]
    pub cm_timeout: Duration,
}

fn defaults() -> PathOptions {
    PathOptions::new(TransportType::Rdma, None)
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use nacre_transport_rdma::RdmaHostOptions;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        attempts: Attempts,
    }

    /// Goal: the commands have the defaults of the host side. Method: no arguments.
    #[test]
    fn defaults_are_those_of_the_host_side() {
        let Attempts {
            retries,
            retry_delay,
            cm_timeout,
        } = Command::parse_from(["test"]).attempts;
        let own = defaults();
        assert_eq!(
            (retries, retry_delay),
            (own.connection_retries, own.retry_delay)
        );
        assert_eq!(cm_timeout, RdmaHostOptions::new(0, 0).cm_timeout);
    }
}
